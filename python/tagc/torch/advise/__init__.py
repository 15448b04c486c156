"""advise() and plan_sites(): what to choose for this model and these links, "off" included. Nothing here
changes a model."""
