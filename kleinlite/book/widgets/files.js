// A button that asks for pictures, and a field that takes those dropped on it: both set `value`.
export default {
  render({ model, el }) {
    const make = (tag, properties) => el.appendChild(Object.assign(document.createElement(tag), properties));
    const button = make("button", { type: "button", className: "jupyter-button widget-button widget-upload" });
    make("div", { className: "kleinlite-drop", textContent: "or drop it here" });
    const input = make("input", { type: "file", accept: "image/*", multiple: true, hidden: true });

    const take = async (files) => {
      const read = async (file) => ({ name: file.name, content: new DataView(await file.arrayBuffer()) });
      model.set("value", await Promise.all([...files].map(read)));
      model.save_changes();
    };
    button.onclick = () => input.click();
    input.onchange = () => {
      take(input.files);
      input.value = ""; // or the same file could not be chosen again
    };
    el.ondragover = (event) => event.preventDefault();
    el.ondrop = (event) => {
      event.preventDefault();
      event.stopPropagation();
      take(event.dataTransfer.files);
    };

    const count = () => {
      button.textContent = `Reference (${model.get("value").length})`;
    };
    count();
    model.on("change:value", count);
    return () => model.off("change:value", count);
  },
};
