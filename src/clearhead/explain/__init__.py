"""Explanations of units in words, written and judged by a language model or by counting, and their scores."""
