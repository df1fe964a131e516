// The chat page: OpenAI's streaming API of this very server, and nothing else.

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];
let messages = [];
let running = null; // AbortController of the answer in work
let context = 0;

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function say(text) {
  $("status").textContent = text;
}

function turn(role) {
  const element = document.createElement("article");
  element.className = `turn ${role}`;
  const title = document.createElement("h2");
  title.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("div");
  element.append(title, body);
  $("log").append(element);
  return body;
}

function part(body, kind) {
  let last = body.lastElementChild;
  if (!last || last.className !== kind) {
    last = document.createElement("span");
    last.className = kind;
    body.append(last);
  }
  return last;
}

function follow(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function request() {
  const fields = { model: $("model").value || null, stream: true, return_progress: true };
  for (const name of SETTINGS.slice(1)) {
    if ($(name).value !== "") fields[name] = Number($(name).value);
  }
  const system = $("system").value.trim();
  return {
    ...fields,
    stream_options: { include_usage: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
  };
}

function show(timings, usage) {
  if (timings) {
    $("f-prompt").textContent = `${timings.prompt_n} tokens, ${timings.prompt_per_second.toFixed(0)}/s`;
    $("f-cache").textContent = `${timings.cache_n} tokens`;
    const pace = timings.predicted_per_second ? `, ${timings.predicted_per_second.toFixed(1)}/s` : "";
    $("f-rate").textContent = `${timings.predicted_n} tokens${pace}`;
    $("f-drafts").textContent = timings.draft_n ? `${timings.draft_n_accepted} of ${timings.draft_n}` : "none";
  }
  if (usage) $("f-context").textContent = `${usage.total_tokens} of ${context}`;
}

async function answer() {
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  say("Reading the prompt …");
  const body = turn("assistant");
  const began = performance.now();
  let text = "", count = 0, first = 0, reason = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress && !first) {
        const { processed, total } = event.prompt_progress;
        say(`Reading the prompt: ${processed} of ${total} tokens`);
      }
      const choice = event.choices[0];
      const piece = choice?.delta.content, thought = choice?.delta.reasoning_content;
      if (piece || thought) {
        if (!first) {
          first = performance.now();
          $("f-first").textContent = `${(first - began).toFixed(0)} ms`;
          say("Answering …");
        }
        count += 1;
        if (count % 8 === 0) {
          $("f-rate").textContent = `${((1000 * (count - 1)) / (performance.now() - first)).toFixed(1)}/s`;
        }
        follow(() => { part(body, thought ? "thought" : "text").append(piece || thought); });
        text += piece || "";
      }
      reason = choice?.finish_reason || reason;
      show(event.timings, event.usage);
    }
    say(reason === "length" ? "The answer reached its limit." : "Answered.");
  } catch (error) {
    if (error.name === "AbortError") {
      say("Stopped.");
    } else {
      part(body, "error").append(error.message);
      say(`Failed: ${error.message}`);
    }
  }
  if (text) messages.push({ role: "assistant", content: text });
  else if (reason === "") messages.pop(); // an unanswered message must not stand before the next one
  running = null;
  $("stop").disabled = true;
  $("send").disabled = false;
  $("message").focus();
}

function ask() {
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  messages.push({ role: "user", content: text });
  follow(() => { turn("user").textContent = text; });
  $("log").scrollTop = $("log").scrollHeight;
  answer();
}

async function models() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (response.status === 401) {
      say("This server wants an API key: give it under Settings.");
      $("key").closest("details").open = true;
      return;
    }
    const { data } = await response.json();
    const chosen = $("model").value;
    $("model").replaceChildren(...data.map((model) => new Option(model.id, model.id, false, model.id === chosen)));
    const current = data.find((model) => model.id === $("model").value);
    context = current?.meta.n_ctx ?? 0;
    $("verdict").textContent = current?.meta.verdict ?? current?.meta.state ?? "";
    if (current?.meta.state === "loading") setTimeout(models, 1000);
  } catch {
    say("The server does not answer.");
  }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("settings").addEventListener("submit", (event) => event.preventDefault()); // Enter in a field changes it, no more
$("stop").addEventListener("click", () => running?.abort());
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
  say("A new chat.");
  $("message").focus();
});
$("model").addEventListener("change", models);
for (const name of SETTINGS) {
  $(name).value = localStorage.getItem(`edgert.${name}`) ?? "";
  $(name).addEventListener("change", () => localStorage.setItem(`edgert.${name}`, $(name).value));
}
$("key").value = sessionStorage.getItem("edgert.key") ?? "";
$("key").addEventListener("change", () => { sessionStorage.setItem("edgert.key", $("key").value); models(); });
models();
