"""What each parameter may send, how long an optimizer's moments are, and the options that say so."""
