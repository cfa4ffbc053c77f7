// OpenAI's library for JavaScript.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const model = process.env.SERAI_MODEL;
const client = new OpenAI({ maxRetries: 0 });
const first = { role: "user", content: "Where do caravans rest?" };
const second = { role: "user", content: "And where do they go?" };
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
const weather = { type: "function", function: { name: "weather", parameters } };

async function plain(messages) {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 12 });
  assert.equal(answer.usage.completion_tokens, 12);
  return answer.choices[0].message.content;
}

async function streamed(messages) {
  let text = "";
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 12, stream: true });
  for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
  return text;
}

test("two turns, plain and streamed, say the same", async () => {
  const said = await plain([first]);
  assert.equal(await streamed([first]), said);
  const turns = [first, { role: "assistant", content: said }, second];
  const again = await plain(turns);
  assert.notEqual(again, said);
  assert.equal(await streamed(turns), again);
});

test("tools, plain and streamed", async () => {
  const asked = await client.chat.completions.create({ model, messages: [first], tools: [weather] });
  const message = asked.choices[0].message;
  const call = message.tool_calls[0];
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  const stream = client.chat.completions.stream({ model, messages: [first], tools: [weather], tool_choice: "required" });
  const summed = (await stream.finalChatCompletion()).choices[0].message;
  assert.equal(summed.tool_calls[0].function.arguments, call.function.arguments);
  const result = { role: "tool", tool_call_id: call.id, content: "sun" };
  const spoken = await client.chat.completions.create({ model, messages: [first, message, result], tools: [weather] });
  assert.ok(spoken.choices[0].message.content);
});

test("responses, plain and streamed, with tools", async () => {
  const answer = await client.responses.create({ model, input: "Where do caravans rest?" });
  assert.ok(answer.output_text);
  const stream = client.responses.stream({ model, input: "Where do caravans rest?" });
  assert.equal((await stream.finalResponse()).output_text, answer.output_text);
  const tools = [{ type: "function", name: "weather", parameters, strict: false }];
  const asked = await client.responses.create({ model, input: [first], tools });
  const call = asked.output.find((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: call.call_id, output: "sun" };
  const spoken = await client.responses.create({ model, input: [first, ...asked.output, result], tools });
  assert.ok(spoken.output_text);
});

test("embeddings, models and headers", async () => {
  const embedded = await client.embeddings.create({ model, input: ["one", "two"] });
  assert.equal(embedded.data[0].embedding.length, 64);
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  assert.ok(names.includes(model));
  const { response } = await client.chat.completions.create({ model, messages: [first] }).withResponse();
  assert.ok(response.headers.get("x-serai-session"));
});

test("errors are the library's own", async () => {
  const asked = client.chat.completions.create({ model: "nobody", messages: [first] });
  await assert.rejects(asked, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
});
