// A picture that is a button: says in which cell of a grid over `area`, a part of it, it was clicked.
export default {
  render({ model, el }) {
    const button = el.appendChild(document.createElement("button"));
    const image = button.appendChild(new Image());
    const outline = button.appendChild(document.createElement("span"));
    const [rows, columns, area] = ["rows", "columns", "area"].map((name) => model.get(name));
    const [left, top, width, height] = area;
    button.type = "button";
    button.title = image.alt = model.get("title");
    button.tabIndex = rows * columns === 1 ? 0 : -1; // a grid has sliders beside it for the keyboard
    outline.hidden = true;

    const cell = ({ clientX, clientY }) => {
      const box = button.getBoundingClientRect();
      const row = Math.floor((((clientY - box.top) / box.height - top) / height) * rows);
      const column = Math.floor((((clientX - box.left) / box.width - left) / width) * columns);
      return row >= 0 && row < rows && column >= 0 && column < columns ? { row, column } : null;
    };
    button.onclick = (event) => {
      const at = event.detail ? cell(event) : { row: 0, column: 0 }; // by the keyboard it has no place
      if (at) model.send(at);
    };
    button.onpointermove = (event) => {
      const at = cell(event);
      outline.hidden = !at;
      if (!at) return;
      outline.style.top = `${100 * (top + (height * at.row) / rows)}%`;
      outline.style.left = `${100 * (left + (width * at.column) / columns)}%`;
      outline.style.height = `${(100 * height) / rows}%`;
      outline.style.width = `${(100 * width) / columns}%`;
    };
    button.onpointerleave = () => {
      outline.hidden = true;
    };

    const show = () => {
      URL.revokeObjectURL(image.src);
      image.src = URL.createObjectURL(new Blob([model.get("value")], { type: "image/png" }));
    };
    show();
    model.on("change:value", show);
    return () => {
      URL.revokeObjectURL(image.src);
      model.off("change:value", show);
    };
  },
};
