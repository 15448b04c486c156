"""`python -m tagc.report` is `tagc-report`."""

from tagc.report.command import main

raise SystemExit(main())
