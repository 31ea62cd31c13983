
// conversations: only those that hold the words; without this script all of them are shown
const find = byId("find");
if (find) {
  const chats = [...document.querySelectorAll(".chat")];
  find.closest(".buttons").hidden = false;
  const filter = () => {
    const words = find.value.toLowerCase();
    chats.forEach((chat) => { chat.hidden = !chat.textContent.toLowerCase().includes(words); });
    byId("found").textContent = `${chats.filter((chat) => !chat.hidden).length} of ${chats.length}`;
  };
  find.addEventListener("input", filter);
  filter();
}
