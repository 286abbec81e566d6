"""The networks: a Llama decoder, its layers and its initializers."""
