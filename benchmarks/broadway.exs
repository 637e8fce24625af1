# One measurement of Broadway by the rules of `benchmarks.broadway`: seconds from its start to the last acknowledgement.
# elixir broadway.exs memory|files MESSAGES FILE-OF-PAYLOADS FOLDER

# BROADWAY names a folder where it is built; else Hex gives it.
unless System.get_env("BROADWAY"), do: Mix.install([{:broadway, "1.3.0"}, {:jason, "1.4.5"}])

defmodule Acknowledged do
  @behaviour Broadway.Acknowledger

  def ack({counter, wanted, waiting}, successful, []) do
    :counters.add(counter, 1, length(successful))
    if :counters.get(counter, 1) >= wanted, do: send(waiting, :done)
  end
end

defmodule Payloads do
  use GenStage

  def init(options), do: {:producer, Map.new(options)}

  def handle_demand(demand, state) do
    count = min(demand, state.left)
    messages = for n <- 1..count//1, do: %Broadway.Message{data: elem(state.payloads, rem(state.left - n, tuple_size(state.payloads))), acknowledger: state.acknowledger}
    {:noreply, messages, %{state | left: state.left - count}}
  end
end

Code.require_file("broadway_events.exs", __DIR__)

[mode, messages, payloads, folder] = System.argv()
wanted = String.to_integer(messages)
Logger.configure(level: :warning)
{:ok, _} = Application.ensure_all_started(:broadway)
payloads = payloads |> File.read!() |> String.split("\n", trim: true) |> Enum.map(&:binary.copy/1) |> List.to_tuple()
counter = :counters.new(1, [:write_concurrency])
producer = [left: wanted, payloads: payloads, acknowledger: {Acknowledged, {counter, wanted, self()}, :ok}]
{folder, size} = if mode == "files", do: {folder, 1_000}, else: {nil, 100}
started = System.monotonic_time(:microsecond)

{:ok, _} =
  Broadway.start_link(Events,
    name: Events,
    context: folder,
    producer: [module: {Payloads, producer}, concurrency: 1],
    processors: [default: [concurrency: System.schedulers_online(), max_demand: 100]],
    batchers: [clicks: [batch_size: size], views: [batch_size: size]]
  )

receive do: (:done -> :ok)
IO.puts((System.monotonic_time(:microsecond) - started) / 1.0e6)
