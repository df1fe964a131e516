"""HTTP: OpenAI's routes and Ollama's over models that answer requests together."""
