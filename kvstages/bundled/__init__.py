"""The making of the model that ships with the repository."""
