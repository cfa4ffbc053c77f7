// Anthropic's library for JavaScript.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const model = process.env.SERAI_MODEL;
const client = new Anthropic({ maxRetries: 0 });
const first = { role: "user", content: "Where do caravans rest?" };
const second = { role: "user", content: "And where do they go?" };
const weather = {
  name: "weather",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const textOf = (message) => message.content.map((block) => (block.type === "text" ? block.text : "")).join("");

test("two turns, plain and streamed, say the same", async () => {
  const said = await client.messages.create({ model, max_tokens: 12, messages: [first] });
  assert.equal(said.usage.output_tokens, 12);
  const streamed = client.messages.stream({ model, max_tokens: 12, messages: [first] });
  assert.equal(await streamed.finalText(), textOf(said));
  const messages = [first, { role: "assistant", content: said.content }, second];
  const again = await client.messages.create({ model, max_tokens: 12, messages });
  assert.notEqual(textOf(again), textOf(said));
  const streamedAgain = client.messages.stream({ model, max_tokens: 12, messages });
  assert.equal(await streamedAgain.finalText(), textOf(again));
});

test("tools, plain and streamed", async () => {
  const asked = { model, max_tokens: 100, tools: [weather] };
  const answer = await client.messages.create({ ...asked, messages: [first] });
  assert.equal(answer.stop_reason, "tool_use");
  const use = answer.content.find((block) => block.type === "tool_use");
  assert.deepEqual(Object.keys(use.input), ["city"]);
  const stream = client.messages.stream({ ...asked, messages: [first], tool_choice: { type: "any" } });
  const streamed = (await stream.finalMessage()).content.find((block) => block.type === "tool_use");
  assert.deepEqual(streamed.input, use.input);
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "sun" }] };
  const messages = [first, { role: "assistant", content: answer.content }, result];
  assert.ok(textOf(await client.messages.create({ ...asked, messages })));
});

test("tokens are counted", async () => {
  assert.ok((await client.messages.countTokens({ model, messages: [first] })).input_tokens > 3);
});

test("errors are the library's own", async () => {
  const asked = client.messages.create({ model: "nobody", max_tokens: 9, messages: [first] });
  await assert.rejects(asked, (error) => error instanceof Anthropic.NotFoundError);
});
