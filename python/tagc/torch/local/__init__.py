"""LocalSteps: sites train by themselves for some steps, and then exchange how far their parameters moved."""
