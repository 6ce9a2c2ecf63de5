"""Training of the gates: the PEFT method, the objective, the trainer and its exports."""
