#!/usr/bin/env bash
# tagc report from real runs: page, pictures and words; bad input; and the page in a browser, where there is one.
source "$(dirname "$0")/lib.sh" "$@"
make_data

train=("${tiny[@]}" --steps 9 --batch-size 8 --n-layer 4 --ranks 2)
run 0 train "${train[@]}" --compress none --exchange dense --out runs/fsdp --trace fsdp.trace.json
run 0 train "${train[@]}" --sparsity 0.9 --out runs/packed --trace packed.trace.json
run 0 train "${train[@]}" --sparsity 0.9 --seed 2 --out runs/packed-2
run 0 bench --model tiny --ranks 2 --arms fsdp,packed --rounds 2 --warmup-steps 1 --steps-per-round 1 --json bench.json
seeds=$here/../../fuzz/seeds/report_files
inputs=(runs/fsdp runs/packed runs/packed-2 fsdp.trace.json packed.trace.json bench.json "$seeds/lab.json" "$seeds/plan.json")

run 0 report --out page.html --svg-dir svg --svg loss=a.svg,time=b.svg --title 'A <b> & "c"' "${inputs[@]}"
grep -q '^page: page.html' out || fail "does not say where the page is"
grep -q 'fastest\|told apart\|faster' out || fail "no verdict on the terminal"
[ "$(awk '{ n = length($0) > n ? length($0) : n } END { print n }' <(LC_ALL=C.UTF-8 cat out))" -le 110 ] || fail "wide output"
[ -e page.html.partial ] && fail "a partial page is left"
cmp -s a.svg svg/loss.svg || fail "the same figure, drawn twice, differs"
for figure in loss loss-time gap pareto pareto-all time bits timeline window memory codec link plan; do
    [ -s "svg/$figure.svg" ] || fail "no svg/$figure.svg"
done
grep -q '<title>A &lt;b&gt; &amp; &quot;c&quot;</title>' page.html || fail "the title is not escaped"
[ "$(wc -c <page.html)" -lt 2000000 ] || fail "a large page"

# The same words without a page; a window by name.
run 0 report runs/fsdp runs/packed
# The first arm and then all of them: what is named twice is one run, not two seeds that agree.
cp out once
run 0 report runs/fsdp runs/packed ./runs/fsdp runs/packed/metrics.jsonl
cmp once out || fail "a run that is named twice counts twice: $(diff once out)"
run 0 report --units h.1,h.2 --svg window=w.svg fsdp.trace.json
grep -q '<title>backward h.[12],' w.svg || fail "not the window that was asked for"

# Where the first arm is better and others only smaller, the edge of what is worth its bits ends at the first.
mkdir worse
sed 's/"val_loss":[0-9.]*/"val_loss":9.5/' runs/packed/metrics.jsonl >worse/metrics.jsonl
run 0 report --quiet --svg pareto=edge.svg runs/fsdp worse
grep -q 'class="line faint[^>]* d="M[0-9. ]*L[0-9. ]*L[0-9. ]*H' edge.svg || fail "the edge passes by the first arm"

# Well-formed, and every element of the page closed.
if command -v python3 >/dev/null; then
    python3 - page.html svg/*.svg <<'PY' || fail "markup"
import html.parser, sys, xml.etree.ElementTree
for path in sys.argv[2:]:
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg") and root[0].tag.endswith("title") and root[1].tag.endswith("desc"), path
class Page(html.parser.HTMLParser):
    void = {"meta", "link", "br", "input"}
    def __init__(self):
        super().__init__()
        self.open, self.ids = [], set()
    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                assert value not in self.ids, value
                self.ids.add(value)
        if tag not in self.void:
            self.open.append(tag)
    def handle_startendtag(self, tag, attributes):
        pass
    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())
page = Page()
page.feed(open(sys.argv[1], encoding="utf-8").read())
assert not page.open, page.open
for wanted in "summary loss time bits timeline memory codec plan lab origin".split():
    assert wanted in page.ids, wanted
PY
    # The recommendation is there to its end, however long.
    python3 - <<'PY' || fail "no bench.json"
import json
bench = json.load(open("bench.json"))
bench["recommendation"]["reason"] = " ".join(f"word{i}" for i in range(120))
json.dump(bench, open("wordy.json", "w"))
PY
    run 0 report --out wordy.html wordy.json
    grep -q 'word118 word119\.' wordy.html || fail "the recommendation is cut short"
fi

# What is wrong is said, and leaves nothing behind.
run 2 report
says "what is to be reported"
run 1 report nowhere
says "nowhere"
run 1 report --svg codec=no.svg runs/fsdp
says "codec: it needs a bench or lab result"
run 1 report --svg looses=no.svg runs/fsdp
says '"looses" is no figure' "loss-time"
run 1 report --svg loss runs/fsdp
says "FIGURE=FILE"
run 1 report --units h.77 fsdp.trace.json
says "h.77" "h.1"
run 1 report --units h.1,h.2 runs/fsdp
says "--units needs a timeline"
run 1 report --out no/page.html runs/fsdp
says "no/page.html"
[ -e no.svg ] || [ -e no ] && fail "a failed report left a file"
mkdir none
run 1 report none
says "nothing to report" "none holds no metrics.jsonl"
echo '{"traceEvents":[]}' >empty.json
run 1 report empty.json
says "empty.json" "no event"
sed 's/"total_s"/"total"/' bench.json >lacks.json
run 1 report lacks.json
says "lacks.json" "arms[0]" 'lacks "total_s"'
head -c -20 runs/fsdp/metrics.jsonl >torn.jsonl
run 0 report torn.jsonl
grep -q 'note: .*not whole' out || fail "a torn line is not told"

browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || skip "no chromium to open the page with"
# <arguments>: what the browser says goes to browser.log
browse() {
    timeout 120 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$scratch/browser" --enable-logging=stderr \
        --log-level=0 --log-net-log="$scratch/net.json" --disable-background-networking --disable-component-update \
        --disable-sync --no-first-run --host-resolver-rules="MAP * ~NOTFOUND" "$@" "file://$scratch/page.html" 2>>browser.log
}
browse --dump-dom >dom.html || skip "the browser does not start here: $(tail -n 1 browser.log)"
grep -q '<input type="checkbox"' dom.html || fail "the script has not run"
[ "$(grep -o '<svg' dom.html | wc -l)" = "$(grep -o '<svg' page.html | wc -l)" ] || fail "the browser sees other figures"
browse --no-pdf-header-footer --print-to-pdf=page.pdf
browse --window-size=390,1500 --screenshot=phone.png >/dev/null
grep 'CONSOLE' browser.log && fail "the console has messages"
grep -q 'Content Security Policy\|Refused to' browser.log && fail "the page asked for what it may not have"
# Browsers have errands of their own, with their maker's hosts.
grep -o '"url":"http[^"]*"' net.json | grep -v 'google\|gvt1\|chromium' >urls && fail "the network was asked: $(head -n 3 urls)"
[ -s phone.png ] || fail "no screenshot"
head -c 5 page.pdf | grep -q '%PDF-' || fail "no PDF"
pages=$(grep -a -o '/Type */Page\b' page.pdf | wc -l)
[ "$pages" -ge 5 ] || fail "$pages pages in print"
echo "opened in $("$browser" --version 2>/dev/null): $pages pages in print"
