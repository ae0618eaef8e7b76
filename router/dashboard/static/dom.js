// Makes and changes elements. Text goes in as text, never as markup: names and ids come from clients.

const SVG = "http://www.w3.org/2000/svg";

// An element of HTML; attributes of the value null are left out.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// An element of SVG.
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Changes a node's text, and leaves it alone where it says so already.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Changes an attribute where it differs.
export function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// A table behind a summary, filled while it is open. Columns are [name, isNumber].
export class TableView {
  constructor(title, columns, short = title) {
    this.columns = columns;
    this.caption = el("caption", {}, title);
    this.body = el("tbody");
    const names = columns.map(([name, isNumber]) => el("th", { scope: "col", class: isNumber ? "number" : null }, name));
    const table = el("table", {}, this.caption, el("thead", {}, el("tr", {}, ...names)), this.body);
    const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${title}` }, table);
    this.node = el("details", {}, el("summary", { "aria-label": `${title} as a table` }, short === "Table" ? short : `${short} as a table`), scroll);
    this.rows = () => [];
    this.node.addEventListener("toggle", () => this.refresh());
  }

  // `rows` is asked for the cells' texts, row by row, whenever the table is looked at.
  show(rows) {
    this.rows = rows;
    this.refresh();
  }

  refresh() {
    if (!this.node.open) return;
    const rows = this.rows();
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((cells, at) => this.fillRow(this.body.rows[at] ?? this.addRow(), cells));
  }

  addRow() {
    const cells = this.columns.map(([, isNumber], at) =>
      at === 0 ? el("th", { scope: "row" }) : el("td", { class: isNumber ? "number" : null }),
    );
    const row = el("tr", {}, ...cells);
    this.body.append(row);
    return row;
  }

  fillRow(row, cells) {
    cells.forEach((text, at) => say(row.cells[at], String(text)));
  }
}
