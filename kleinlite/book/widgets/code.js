// Lines of code, and a button that copies them.
export default {
  render({ model, el }) {
    const copy = el.appendChild(document.createElement("button"));
    const code = el.appendChild(document.createElement("code"));
    copy.type = "button";
    copy.onclick = async () => {
      await navigator.clipboard.writeText(model.get("value"));
      copy.textContent = "copied";
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
