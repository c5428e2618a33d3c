"""The direction study: what each criterion predicted, and what the optimiser step did."""
