"use strict";
const byId = (id) => document.getElementById(id);

// tooltips: whatever carries data-tip tells it
const tip = byId("tip");
document.addEventListener("pointermove", (event) => {
  const told = event.target.closest?.("[data-tip]");
  tip.hidden = !told;
  if (!told) return;
  tip.textContent = told.dataset.tip;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above < 8 ? event.clientY + 18 : above}px`;
});
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// theme: as the system has it until the reader chooses
const theme = byId("theme");
const themes = ["auto", "light", "dark"];
let chosen = 0;
theme.hidden = false;
theme.addEventListener("click", () => {
  chosen = (chosen + 1) % themes.length;
  theme.textContent = `theme: ${themes[chosen]}`;
  document.documentElement.style.colorScheme = chosen ? themes[chosen] : "light dark";
});

