"""The unified prefix tree: decides what is where, performs nothing."""
