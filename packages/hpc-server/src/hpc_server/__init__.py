"""An OpenAI-compatible server with exact prefix reuse."""
