"""Checks at a call that the running program still agrees with the model as the user sees it."""
