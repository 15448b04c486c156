"""tagc.report: one page and pictures of what was measured, from the files that `tagc` and the lab write.

`tagc-report FILES... --out report.html` is the command. Reading and the summary need nothing but Python; figures need
altair and vl-convert-python (`pip install "tagc[report]"`). torch is not needed.

    reading     JSON with errors that name file and place; texts made safe to print
    model       what a report is made from; runs, results, traces read into it, groups puts runs side by side
    pareto      which arms are worth their bits
    summary     what someone who must decide wants to know first
    figures     the list of figures; each is one Vega-Lite specification
    page        the HTML page: specifications, tables, and the Vega library, in one file
    command     tagc-report"""
