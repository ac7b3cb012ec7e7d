// Sorting and filtering of the leaderboard, and copy buttons. Without it the page is whole, too.
(() => {
  "use strict";
  const table = document.querySelector("table.board");
  if (table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const filters = document.querySelector(".filters");
    const shown = document.querySelector(".shown");
    const text = filters.querySelector("input");
    const selects = [...filters.querySelectorAll("select")];
    const searched = rows.map((row) => row.textContent.toLowerCase());

    const names = [];
    const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const compare = (a, b, column) => {
      const [x, y] = [value(a, column), value(b, column)];
      // what is missing comes last, whichever way the rest is sorted
      if (x === "" || y === "") return x === y ? 0 : x === "" ? Infinity : -Infinity;
      return heads[column].classList.contains("n")
        ? Number(x) - Number(y)
        : x.localeCompare(y, undefined, { numeric: true });
    };
    const sort = (column, order) => {
      const sign = order === "descending" ? -1 : 1;
      const sorted = rows
        .map((row, place) => [row, place])
        .sort(([a, i], [b, j]) => {
          const c = compare(a, b, column);
          return (Number.isFinite(c) ? sign * c : c) || i - j;
        });
      body.append(...sorted.map(([row]) => row));
      heads.forEach((head, i) => {
        if (i === column) head.setAttribute("aria-sort", order);
        else head.removeAttribute("aria-sort");
      });
      table.dataset.sorted = `${names[column]}, ${order}`;
      tell();
    };
    const tell = () => {
      const left = rows.filter((row) => !row.hidden).length;
      shown.textContent = `${left} of ${rows.length} rows, sorted by ${table.dataset.sorted}`;
    };
    const filter = () => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, i) => {
        const named = words.every((word) => searched[i].includes(word));
        const chosen = selects.every((s) => !s.value || row.dataset[s.name] === s.value);
        row.hidden = !(named && chosen);
      });
      tell();
    };

    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      const arrow = document.createElement("span");
      arrow.className = "arrow";
      const [label, ...below] = head.childNodes;
      label.textContent = label.textContent.trim();
      names[column] = label.textContent;
      button.append(label, arrow, ...below);
      head.append(button);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const first = head.classList.contains("n") ? "descending" : "ascending";
        const other = first === "descending" ? "ascending" : "descending";
        sort(column, now === first ? other : first);
      });
    });
    for (const select of selects) {
      const found = [...new Set(rows.map((row) => row.dataset[select.name]))].filter(Boolean);
      for (const name of found.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }))) select.append(new Option(name, name));
      select.closest("label").hidden = found.length < 2;
      select.addEventListener("change", filter);
    }
    text.addEventListener("input", filter);
    filters.hidden = false;
    table.dataset.sorted = "Test, descending";
    tell();
  }

  for (const block of document.querySelectorAll("pre")) {
    if (!navigator.clipboard) break;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.classList.add("copies");
    block.append(button);
  }

  // A link to a command opens the fold that it lies in
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const fold = target && target.closest("details");
    if (fold) {
      fold.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  open();
})();
