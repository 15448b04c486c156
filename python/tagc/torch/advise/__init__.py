"""advise(): what to choose for this model on these links, "off" included. Nothing here changes a model."""
