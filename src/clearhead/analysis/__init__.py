"""What a unit does: when it is active, from which tokens, on which logits, and which original heads it resembles."""
