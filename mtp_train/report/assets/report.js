// examples: one at a time; without this script all of them stand one below the other
const reader = document.querySelector(".reader");
if (reader) {
  const examples = [...reader.querySelectorAll(".example")];
  const pick = byId("pick");
  const show = (index) => {
    const now = (index + examples.length) % examples.length;
    pick.value = String(now);
    examples.forEach((example, i) => { example.hidden = i !== now; });
  };
  reader.querySelector(".buttons").hidden = false;
  pick.addEventListener("change", () => show(Number(pick.value)));
  byId("back").addEventListener("click", () => show(Number(pick.value) - 1));
  byId("on").addEventListener("click", () => show(Number(pick.value) + 1));
  byId("drafts").addEventListener("change", (event) => {
    reader.classList.toggle("accepted-only", !event.target.checked);
  });
  show(0);

  // each piece tells who said it: to the pointer as a tooltip, to the keyboard in the line above the text
  const said = {
    target: "the target's own token",
    accepted: "accepted draft: the head proposed it, the target would have said the same",
    rejected: "rejected draft: the head proposed it, the target said otherwise; not in the output",
  };
  const piece = reader.querySelector(".piece");
  piece.hidden = false;
  for (const answer of reader.querySelectorAll(".answer")) {
    const pieces = [...answer.querySelectorAll(".seg")];
    pieces.forEach((seg) => { seg.dataset.tip = said[seg.classList[1]]; });
    const step = (from, by) => {
      let to = from + by;
      while (pieces[to] && !pieces[to].offsetParent) to += by; // rejected drafts may be hidden
      return pieces[to] ? to : from;
    };
    const choose = (index) => {
      pieces.forEach((seg, i) => { seg.classList.toggle("current", i === index); });
      const seg = pieces[index];
      if (!seg) return;
      piece.textContent = `Piece ${index + 1} of ${pieces.length}, \u201c${seg.textContent.trim()}\u201d: ${seg.dataset.tip}.`;
    };
    const current = () => pieces.findIndex((seg) => seg.classList.contains("current"));
    const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    answer.tabIndex = 0;
    answer.addEventListener("keydown", (event) => {
      const by = keys[event.key];
      if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const from = current();
      choose(from < 0 ? step(-1, 1) : step(from, by));
    });
    answer.addEventListener("click", (event) => { choose(pieces.indexOf(event.target.closest(".seg"))); });
    answer.addEventListener("blur", () => choose(-1));
  }
}
