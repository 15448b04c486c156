"""One exchange: connections, layouts, reducers, residuals by parameter, and the ways in which it runs.
Nothing here knows a model or a schedule."""
