"""Pictures of a batch, a run, several runs, and of what the model learned."""
