/* tagc report: moved into Python. */
#include "cli/commands.h"
#include "launch/ranks.h"

int tagc_command_report(int argc, char **argv) {
    (void)argc;
    (void)argv;
    tagc_ranks_complain(
        tagc_ranks_launcher_rank(),
        "report has become a command of its own with the same options: in a clone, pip install "
        "\".[report]\", then tagc-report PATH... --out report.html");
    return TAGC_EXIT_USAGE;
}
