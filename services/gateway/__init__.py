"""HTTP: an OpenAI-compatible face and our own `/v1/jobs`, over the same job records as everyone."""
