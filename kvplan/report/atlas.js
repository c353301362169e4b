"use strict";
// Words in any order name a model, a GPU, or both: "4090 qwen3 8b".
(() => {
  const names = JSON.parse(document.getElementById("names").textContent);
  const box = document.getElementById("box"), hits = document.getElementById("hits"), status = document.getElementById("count");
  const most = 40;
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9.]+/g, " ");
  const models = names.models.map(([name, id]) => ({ name, id, text: plain(`${name} ${id}`) }));
  const gpus = names.gpus.map((name) => ({ name, text: plain(name) }));

  function found(words) {
    const ofGpu = words.filter((word) => gpus.some((gpu) => gpu.text.includes(word)));
    const links = [];
    const add = (text, href, note) => links.push({ text, href, note });
    const modelWords = words.filter((word) => models.some((model) => model.text.includes(word)));
    for (let count = ofGpu.length; count >= 0; count--) { // the most words that name a GPU, the rest a model
      const gpuWords = ofGpu.filter((word) => !modelWords.includes(word) || count === ofGpu.length).slice(0, count);
      const rest = words.filter((word) => !gpuWords.includes(word));
      const someGpus = gpuWords.length ? gpus.filter((gpu) => gpuWords.every((word) => gpu.text.includes(word))) : [];
      const someModels = rest.length ? models.filter((model) => rest.every((word) => model.text.includes(word))) : [];
      if (gpuWords.length && rest.length) {
        for (const model of someModels) for (const gpu of someGpus) add(`${model.name} on ${gpu.name}`, `models/${model.name}/${gpu.name}.html`, model.id);
      }
      if (!gpuWords.length) for (const model of someModels) add(model.name, `models/${model.name}/index.html`, model.id);
      if (!rest.length) for (const gpu of someGpus) add(gpu.name, `gpus/${gpu.name}.html`, "GPU");
    }
    return [...new Map(links.map((link) => [link.href, link])).values()].sort((a, b) => a.text.length - b.text.length);
  }

  function show() {
    const words = plain(box.value).split(" ").filter(Boolean);
    const links = words.length ? found(words) : [];
    hits.replaceChildren(...links.slice(0, most).map(({ text, href, note }) => {
      const item = document.createElement("li"), link = document.createElement("a"), small = document.createElement("span");
      link.href = href;
      link.textContent = text;
      small.className = "note";
      small.textContent = ` ${note}`;
      item.append(link, small);
      return item;
    }));
    status.textContent = words.length ? `${links.length} ${links.length === 1 ? "page" : "pages"}${links.length > most ? `, the first ${most} shown` : ""}` : "";
  }
  box.addEventListener("input", show);
  box.form.addEventListener("submit", (event) => {
    event.preventDefault();
    hits.querySelector("a")?.click();
  });
  show();
})();
