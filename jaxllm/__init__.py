"""Train an LLM in JAX: POET, supervised fine-tuning and GRPO."""
