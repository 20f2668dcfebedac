"""A small GPT in plain torch, trained on English text that every Python carries."""
