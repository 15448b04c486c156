"""Models that are compiled whole: SimpleFSDP's parametrizations, whose collectives are operators of tagc."""
