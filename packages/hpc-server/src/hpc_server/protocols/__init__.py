"""OpenAI's protocols: what is read from a request, and the shapes of answers."""
