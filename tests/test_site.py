"""The pages of the site fit screens of 1280 and 390 pixels: no text is cut, and no word of code in a table is broken.

Chromium measures them, after `make -C docs html`.
"""

import functools
import http.server
import json
import pathlib
import queue
import re
import shutil
import subprocess
import threading
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SITE = ROOT / "docs" / "_build" / "html"
PAGES = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if "_static" not in page.parts)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = 1280, 390
pytestmark = [pytest.mark.multiprocess, pytest.mark.skipif(not PAGES, reason="no site: make -C docs html")]

MEASURE = """<!doctype html><body><script>
function faults(frame, width) {
  const page = frame.contentDocument, found = new Set();
  const main = page.querySelector(".bd-article-container"), column = main.getBoundingClientRect().right;
  const walker = page.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  if (page.documentElement.scrollWidth > width) found.add("the page is wider than the screen");
  for (let node; (node = walker.nextNode()); ) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility() || parent.closest("script, style, .visually-hidden")) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (!box.width) continue;
      let end = column;
      for (let above = parent; above != main; above = above.parentElement) {
        const overflow = frame.contentWindow.getComputedStyle(above).overflowX;
        if (overflow == "auto" || overflow == "scroll") { end = Infinity; break; }
        if (overflow != "visible") end = Math.min(end, above.getBoundingClientRect().right);
      }
      if (box.right > end + 1) found.add("cut: " + node.data.trim().slice(0, 60));
    }
  }
  for (const code of main.querySelectorAll("table.table code")) {
    const places = [], range = page.createRange();  // of each character, since a word may have several nodes
    const texts = page.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    for (let node; (node = texts.nextNode()); ) for (let at = 0; at < node.length; at++) places.push([node, at]);
    for (const word of code.textContent.matchAll(/\\w{1,27}\\b/g)) {
      const [last, at] = places[word.index + word[0].length - 1];
      range.setStart(...places[word.index]);
      range.setEnd(last, at + 1);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) found.add("broken: " + word[0]);
    }
  }
  // What programs print may be wider, and scrolls: the long lines of errors, for example.
  if (width >= 1280) for (const code of main.querySelectorAll("pre")) {
    if (code.closest(".cell_output, .highlight-text")) continue;
    if (code.scrollWidth > code.clientWidth + 1) found.add(`${code.scrollWidth} pixels in ${code.clientWidth}: ` +
      code.textContent.split("\\n").reduce((a, b) => b.length > a.length ? b : a).slice(0, 130));
  }
  return [...found];
}
async function measure() {
  const result = {};
  for (const width of WIDTHS) for (const name of PAGES) {
    const frame = document.createElement("iframe");
    frame.width = width;
    frame.height = 900;
    frame.src = name;
    document.body.append(frame);
    await new Promise(loaded => frame.onload = loaded);
    result[`${name} at ${width} pixels`] = faults(frame, width);
    frame.remove();
  }
  return result;
}
measure().catch(error => ({error: [String(error)]})).then(
  result => fetch("/result", {method: "POST", body: JSON.stringify(result)}));
</script>"""


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and a page that measures the others and posts what it finds."""

    results: queue.Queue = queue.Queue()

    def do_GET(self):
        if self.path != "/measure.html":
            return super().do_GET()
        page = MEASURE.replace("WIDTHS)", f"{list(WIDTHS)})").replace("PAGES)", f"{json.dumps(PAGES)})")
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def do_POST(self):
        self.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_nothing_is_cut(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        page = f"http://127.0.0.1:{server.server_port}/measure.html"
        browser = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={tmp_path}", "--remote-debugging-port=0", page],
            stderr=subprocess.DEVNULL,
        )
        try:
            result = Server.results.get(timeout=300)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
    assert len(result) == len(WIDTHS) * len(PAGES), result
    faults = [f"{page}: {fault}" for page, faults in result.items() for fault in faults]
    assert not faults, "\n".join(faults)


def test_guides_open_in_colab_and_kaggle():
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    guides = [guide.stem for guide in (ROOT / "guides").glob("*.py") if "__file__" not in guide.read_text()]
    assert guides
    for name in guides:
        notebook = (SITE / "_sources" / "guides" / f"{name}.ipynb").read_text()
        assert f"git+{source}" in notebook
        links = re.findall(r'<a class="launch" href="([^"]*)"', (SITE / "guides" / f"{name}.html").read_text())
        path = f"{source.removeprefix('https://github.com')}/blob/gh-pages/_sources/guides/{name}.ipynb"
        assert links == [
            f"https://colab.research.google.com/github{path}",
            f"https://kaggle.com/kernels/welcome?src=https://github.com{path}",
        ]
