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
}
