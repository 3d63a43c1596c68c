// Every line of microklein, broken: what a change of the line that is pointed at draws, and from a picture to its line.
import { make } from "./page.js";

const FOLDER = new URL("every_line/", import.meta.url),
  SIDE = 96,
  COLUMNS = 12; // of the sheet

/** A picture of the sheet. */
const cut = (number) =>
  make("span.cut", {
    style: `background: url(${new URL("pictures.jpg", FOLDER)}) -${number % COLUMNS * SIDE}px -${
      Math.floor(number / COLUMNS) * SIDE
    }px`,
  });

/** What became of a change, in words. */
function outcome({ error, levels, most, judge }) {
  if (error) return `It draws nothing: ${error}.`;
  if (most <= 1) return "The picture stays. If anything finds this change, it is a comparison of numbers.";
  const seen = judge.replaceAll("unclear", "something");
  return `${
    levels.toFixed(1)
  } levels of 255 away on average, where test_microklein allows at most one anywhere. The judge sees: ${seen}.`;
}

/** Where on the screen each line of a block of code begins: on a phone a long one takes several rows. */
function tops(code) {
  const found = [], texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), range = document.createRange();
  let begins = true;
  for (let node; (node = texts.nextNode());) {
    for (let at = 0; at < node.length; at++) {
      if (begins) {
        range.setStart(node, at);
        range.setEnd(node, at + 1);
        const { top, height } = range.getBoundingClientRect();
        found.push(height && node.data[at] !== "\n" ? top : Infinity); // nobody points at an empty line
      }
      begins = node.data[at] === "\n";
    }
  }
  return found;
}

const entry = (change) =>
  make(
    "li",
    {},
    change.picture ? cut(change.picture) : "",
    make(
      "div",
      {},
      make("code", {}, change.before),
      " → ",
      make("code", {}, change.after),
      make("p", {}, outcome(change)),
    ),
  );

async function showLines(place) {
  const { starts, changes } = await (await fetch(new URL("lines.json", FOLDER))).json(),
    words = make("p", { role: "status" }),
    list = make("ul", {}),
    close = make("button", { type: "button", "aria-label": "Close" }, "×"),
    panel = make("div.live.breaking", { hidden: true }, close, words, list);
  const marks = new Map(); // line → its button
  let shown = null;

  function show(line) {
    if (line === shown) return;
    marks.get(shown)?.setAttribute("aria-pressed", "false");
    shown = line;
    panel.hidden = line === null;
    if (line === null) return;
    marks.get(line).setAttribute("aria-pressed", "true");
    const its = changes.filter((change) => change.line === line);
    words.textContent = `Line ${line}, broken in ${its.length === 1 ? "one way" : `${its.length} ways`}`;
    list.replaceChildren(...its.map(entry));
  }

  for (const code of document.querySelectorAll("main pre > code")) {
    const part = /^# ---- (\d+)\./.exec(code.textContent)?.[1];
    if (!part) continue;
    const pre = code.parentElement, { length } = code.textContent.trimEnd().split("\n");
    pre.classList.add("breakable");
    for (let i = 0; i < length; i++) {
      const line = starts[part] + i;
      if (!changes.some((change) => change.line === line)) continue;
      const mark = make("button.break", {
        type: "button",
        "aria-label": `Break line ${line}`,
        "aria-pressed": "false",
        onfocus: () => show(line),
        onclick: () => show(line),
      });
      marks.set(line, mark);
      pre.append(mark);
    }
    const lay = () => {
      const top = pre.getBoundingClientRect().top;
      tops(code).forEach((y, i) => {
        const mark = marks.get(starts[part] + i);
        if (mark) mark.style.top = `${y - top}px`;
      });
    };
    lay();
    new ResizeObserver(lay).observe(code);
    pre.addEventListener("pointermove", (event) => {
      const line = starts[part] + tops(code).findLastIndex((y) => y <= event.clientY);
      if (marks.has(line)) show(line);
    });
  }
  close.onclick = () => show(null);
  document.addEventListener("keydown", (event) => event.key === "Escape" && show(null));
  document.body.append(panel);

  const drawn = changes.filter((change) => change.picture).sort((a, b) => b.levels - a.levels);
  place.replaceChildren(
    make(
      "div.wrong-pictures",
      {},
      ...drawn.filter((change) => change.most > 1).map((change) =>
        make(
          "button",
          {
            type: "button",
            title: `line ${change.line}: ${change.before} → ${change.after}`,
            "aria-label": `Line ${change.line}, ${
              change.levels.toFixed(1)
            } levels away, the judge sees ${change.judge}`,
            onclick: () => {
              show(change.line);
              marks.get(change.line).scrollIntoView({ block: "center" });
            },
          },
          cut(change.picture),
        )
      ),
    ),
  );
}

const page = document.querySelector("#live-lines");
if (page) showLines(page);
