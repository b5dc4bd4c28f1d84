"""Attribution graphs: one prompt, from its logits back to tokens, with the heads that carry every edge."""
