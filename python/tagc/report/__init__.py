"""tagc.report: one page and pictures of what was measured, from the files that `tagc` and the lab write.

`tagc-report FILES... --out report.html` is the command. Reading and the summary need nothing but Python;
figures need altair and vl-convert-python (`pip install "tagc-train[report]"`). torch is not needed.

    reading     JSON with errors that name file and place; texts made safe to print
    model       the data of a report; runs, results and traces fill it, groups compares runs
    pareto      which arms are worth their bits
    summary     the conclusions: which arm is fastest, at which loss
    figures     the list of figures; each is one Vega-Lite specification
    page        the HTML page: specifications, tables, and the Vega library, in one file
    command     tagc-report"""

COMMAND = "a page and pictures of runs and measurements, as tagc-report"
