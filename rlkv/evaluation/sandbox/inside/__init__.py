"""The processes of the sandbox, which import this folder by its path: standard library only."""
