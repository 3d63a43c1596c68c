// What the living parts of pages are made of.

export const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Puts text into the clipboard, and says whether that could be done: over http there is none, and a frame may be refused. */
export const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
};

/** A file of the browser's downloads. */
export function save(blob, name) {
  const href = URL.createObjectURL(blob);
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

/** An element: make("p.note", { title: "…" }, "text", child, …) */
export function make(what, attributes = {}, ...children) {
  const [name, ...classes] = what.split("."),
    element = document.createElement(name);
  element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** An input with its name, in a form. */
export function field(name, label, input) {
  input.name = name;
  return make("label", {}, make("span", {}, label), input);
}

/** A slider with its name and value. */
export function slider(label, { min, max, step = 1, value }, changed, show = (v) => v) {
  const text = String(show(value)),
    shown = make("output", { "aria-live": "off" }, text), // the slider itself says its value
    input = make("input", { type: "range", min, max, step, value, "aria-label": label, "aria-valuetext": text });
  input.oninput = () => {
    shown.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", shown.textContent);
    changed(Number(input.value));
  };
  return make("label.slider", {}, make("span", {}, label), input, shown);
}

/** Buttons of which one is pressed. */
export function toggles(label, options, value, changed) {
  const buttons = options.map(([text, its]) =>
    make(
      "button",
      {
        type: "button",
        "aria-pressed": String(its === value),
        onclick: (event) => {
          for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
          changed(its);
        },
      },
      text,
    )
  );
  return make("div.toggles", { role: "group", "aria-label": label }, ...buttons);
}

/** Puts 8-bit pixels onto a canvas. */
export function paint(canvas, { rgba, width, height }) {
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
  return canvas;
}

/** A canvas with its caption, which names it for those who do not see it. */
export function figure(canvas, caption) {
  const words = typeof caption === "string" ? make("figcaption", {}, caption) : caption;
  words.id ||= `caption-${++captions}`;
  canvas.setAttribute("role", "img");
  if (!canvas.hasAttribute("aria-label")) canvas.setAttribute("aria-labelledby", words.id);
  return make("figure", {}, words, canvas);
}
let captions = 0;
