"""The way to the Kubernetes API: the port, its aiohttp client, and the reflector."""
