// Sorting by a click on a column's head, and tooltips that come at once. Text only ever moves
// through textContent.
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  const missing = (row, column) =>
    row.cells[column].classList.contains("n") && row.cells[column].dataset.v === undefined;
  const sort = (head, column) => {
    const table = head.closest("table");
    const down = head.getAttribute("aria-sort") !== "descending" &&
      (head.classList.contains("n") || head.getAttribute("aria-sort") === "ascending");
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const gaps = missing(a, column) - missing(b, column);
      if (gaps) return gaps;
      const [u, v] = [value(a, column), value(b, column)];
      const order = typeof u === "number" && typeof v === "number"
        ? u - v : String(u).localeCompare(String(v), "en", {numeric: true});
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  };
  for (const head of document.querySelectorAll("table.sortable th")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sorter";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, head.cellIndex));
    head.append(button);
  }
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let held = null;
  const release = () => {
    if (held) held.owner.append(held.title);
    held = null;
    tip.hidden = true;
  };
  document.addEventListener("pointerover", (event) => {
    release();
    const owner = event.target;
    const title = owner instanceof SVGElement && owner.querySelector(":scope > title");
    if (!title) return;
    held = {owner, title};
    title.remove();
    tip.textContent = title.textContent;
    tip.hidden = false;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const left = Math.min(event.clientX + 14, root.clientWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < root.clientHeight;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
  });
  document.documentElement.addEventListener("pointerleave", release);
})();
