"""A prefix index for hybrid language models: content-addressed KV blocks and sparse state snapshots."""
