#!/usr/bin/env bash
# What tagc writes today, on the page of tagc-report: from real runs, and in a browser, where there is one.
source "$(dirname "$0")/lib.sh" "$@"
run 2 report runs/fsdp
says "tagc-report PATH... --out report.html" "pip install"
run 2 report --help
run 2 compare --svg a.svg runs/fsdp
says "tagc-report --svg loss=a.svg RUN_DIR..."

python=$("$here/../../scripts/python.sh" find 2>&1) || skip "$python"
"$python" -c 'import altair, vl_convert' 2>/dev/null || skip "altair or vl-convert-python is not installed"
make_data
train=("${tiny[@]}" --steps 9 --batch-size 8 --n-layer 4 --ranks 2)
run 0 train "${train[@]}" --compress none --exchange dense --out runs/fsdp --trace fsdp.trace.json
run 0 train "${train[@]}" --exchange packed --sparsity 0.9 --out runs/packed --trace packed.trace.json
run 0 train "${train[@]}" --exchange packed --sparsity 0.9 --seed 2 --out runs/packed-2
run 0 bench --model tiny --ranks 2 --arms fsdp,packed --rounds 2 --warmup-steps 1 --steps-per-round 1 --json bench.json
export PYTHONPATH=$here/../../python
report() { # <expected exit code> <arguments of tagc-report>...
    local expected=$1 code=0
    shift
    timeout 300 "$python" -m tagc.report "$@" >out 2>err || code=$?
    [ "$code" = "$expected" ] || fail "exit code $code instead of $expected: tagc-report $*"
}
report 0 --out page.html runs/fsdp runs/packed runs/packed-2 fsdp.trace.json packed.trace.json bench.json
grep -q '^page: page.html' out || fail "does not say where the page is"
grep -q 'fastest\|differs clearly\|faster' out || fail "no verdict on the terminal"
grep -q '^packed .* [0-9.]* *[+-][0-9.]* %$' out || fail "no loss of packed: $(cat out)"
for name in loss loss-time loss-bits gap pareto pareto-all time bits timeline window memory codec link; do
    grep -q "id=\"figure-$name\"" page.html || fail "no figure $name"
done
head -c -20 runs/fsdp/metrics.jsonl >torn.jsonl
report 0 torn.jsonl
grep -q 'note: .*incomplete' out || fail "a torn line is not mentioned"

browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || skip "no chromium to open the page with"
# What a person does: a click on an entry of a legend, which hides that arm, and a turn of the wheel with Ctrl.
sed 's|^</body>$|<script>\
const at = setInterval(() => {\
  if (!document.body.dataset.drawn) return;\
  clearInterval(at);\
  const figure = document.querySelector("#figure-loss"), marks = () => figure.querySelectorAll(".mark-symbol.role-mark path").length;\
  const axis = () => figure.querySelector(".role-axis-label").textContent;\
  document.body.dataset.before = marks();\
  figure.querySelector(".role-legend-label text").dispatchEvent(new MouseEvent("click", {bubbles: true}));\
  setTimeout(() => {\
    document.body.dataset.hidden = marks();\
    const before = axis(), plot = figure.querySelector(".root .background"), box = plot.getBoundingClientRect();\
    plot.dispatchEvent(new WheelEvent("wheel", {bubbles: true, cancelable: true, ctrlKey: true, deltaY: -400,\
      clientX: box.left + 300, clientY: box.top + 100}));\
    setTimeout(() => { document.body.dataset.zoomed = String(axis() !== before); }, 400);\
  }, 400);\
}, 50);\
</script></body>|' page.html >clicked.html
browse() { # <page> <arguments>...: what the browser says goes to browser.log
    local page=$1
    shift
    timeout 240 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$scratch/browser" --enable-logging=stderr \
        --log-level=0 --log-net-log="$scratch/net.json" --disable-background-networking --disable-component-update \
        --disable-sync --no-first-run --host-resolver-rules="MAP * ~NOTFOUND" --virtual-time-budget=20000 "$@" "file://$scratch/$page" 2>>browser.log
}
# What is found below where a page asks the network, and fills the console: a page that does both.
echo '<img src="http://asked.example/a.png"><script>console.log("heard")</script>' >asks.html
browse asks.html --dump-dom >/dev/null || skip "the browser does not start here: $(tail -n 1 browser.log)"
asked() { # browsers have errands of their own, with their maker's hosts
    grep -o '"url":"http[^"]*"' net.json | grep -vE 'google|gvt1|chromium'
}
asked | grep -q asked.example || fail "a page that asks the network is not found out: $(asked | head -n 3)"
grep -q 'CONSOLE.*heard' browser.log || fail "a page that writes to the console is not found out"
rm browser.log
browse clicked.html --dump-dom >dom.html || skip "the browser does not start here: $(tail -n 1 browser.log)"
body=$(grep -o '<body[^>]*>' dom.html | head -n 1)
drawn=$(grep -o 'data-drawn="[0-9]*"' <<<"$body" | tr -dc 0-9)
[ "$drawn" = "$(grep -o 'class="drawing"' page.html | wc -l)" ] || fail "the browser draws ${drawn:-no} figures: $body"
hidden=$(grep -o 'data-hidden="[0-9]*"' <<<"$body" | tr -dc 0-9) before=$(grep -o 'data-before="[0-9]*"' <<<"$body" | tr -dc 0-9)
[ "${hidden:-0}" -gt 0 ] && [ "$hidden" -lt "$before" ] || fail "a click in the legend hides nothing: $body"
grep -q 'data-zoomed="true"' <<<"$body" || fail "the wheel does not zoom: $body"
browse page.html --no-pdf-header-footer --print-to-pdf=page.pdf
grep 'CONSOLE' browser.log && fail "the console has messages"
grep -q 'Content Security Policy\|Refused to' browser.log && fail "the page asked for what it may not have"
[ -s net.json ] || fail "the browser kept no log of the network"
asked && fail "the network was asked: $(asked | head -n 3)"
head -c 5 page.pdf | grep -q '%PDF-' || fail "no PDF"
pages=$(grep -a -o '/Type */Page\b' page.pdf | wc -l)
[ "$pages" -ge 5 ] || fail "$pages pages in print"
echo "opened in $("$browser" --version 2>/dev/null): $drawn figures, $pages pages in print"
