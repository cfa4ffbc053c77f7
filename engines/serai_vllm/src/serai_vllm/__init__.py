"""What of Serai runs inside vLLM: a scheduler whose phase the agent sets. Only `scheduler` imports vLLM."""
