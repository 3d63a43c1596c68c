// Lines of code, and a button that copies them.
export default {
  render({ model, el }) {
    const copy = el.appendChild(document.createElement("button"));
    const code = el.appendChild(document.createElement("code"));
    copy.type = "button";
    copy.onclick = async () => {
      try {
        await navigator.clipboard.writeText(model.get("value"));
        copy.textContent = "copied";
      } catch { // over http there is no clipboard, and a frame may be refused
        getSelection().selectAllChildren(code);
        copy.textContent = "selected: press Ctrl-C or ⌘C";
      }
    };
    const show = () => {
      code.textContent = model.get("value");
      copy.textContent = "copy";
    };
    show();
    model.on("change:value", show);
    return () => model.off("change:value", show);
  },
};
