# The Broadway pipeline that benchmarks compare with: decodes events, routes them to two batchers, and writes a file of
# JSON lines for each batch into the folder that is its context. Without a folder, a batch is only counted.

defmodule Events do
  use Broadway
  alias Broadway.Message

  def handle_message(_, %Message{data: data} = message, _) do
    event = Jason.decode!(data)
    batcher = if event["kind"] == "click", do: :clicks, else: :views
    message |> Message.put_data(event) |> Message.put_batcher(batcher)
  end

  def handle_batch(_, messages, _, nil), do: messages

  def handle_batch(batcher, messages, _, folder) do
    lines = Enum.map(messages, &[Jason.encode_to_iodata!(&1.data), ?\n])
    File.write!("#{folder}/#{batcher}-#{:erlang.unique_integer([:positive])}.ndjson", lines, [:raw])
    messages
  end
end
