# One measurement of Broadway and a connector of it by the rules of `benchmarks.same_source`. Prints seconds and seconds
# of processor time, from its start to the last acknowledgement.
# elixir broadway_source.exs MESSAGES FOLDER kafka HOST PORT TOPIC GROUP
# elixir broadway_source.exs MESSAGES FOLDER rabbitmq PORT QUEUE

Code.require_file("broadway_events.exs", __DIR__)

defmodule Source do
  def applications("kafka"), do: [:brod]
  def applications("rabbitmq"), do: [:amqp]

  # With producers, processors, processes of each batcher, and size of a batch, for two cores. Kafka's are not tuned.
  def producer("kafka", [host, port, topic, group]) do
    fetch = [max_bytes: 1_000_000, max_wait_time: 100]

    options = [
      hosts: [{host, String.to_integer(port)}],
      topics: [topic],
      group_id: group,
      receive_interval: 10,
      offset_reset_policy: :earliest,
      fetch_config: fetch
    ]

    {{BroadwayKafka.Producer, options}, {2, 2, 2, 1_000}}
  end

  def producer("rabbitmq", [port, queue]) do
    connection = [host: "127.0.0.1", port: String.to_integer(port)]
    options = [queue: queue, connection: connection, qos: [prefetch_count: 5_000], on_failure: :reject]
    {{BroadwayRabbitMQ.Producer, options}, {4, 2, 1, 1_000}}
  end
end

[messages, folder, source | place] = System.argv()
wanted = String.to_integer(messages)
Logger.configure(level: :error)
for application <- [:broadway | Source.applications(source)], do: {:ok, _} = Application.ensure_all_started(application)

counter = :counters.new(1, [])
waiting = self()

count = fn _, _, %{successful_messages: acknowledged}, _ ->
  :counters.add(counter, 1, length(acknowledged))
  if :counters.get(counter, 1) >= wanted, do: send(waiting, :done)
end

:ok = :telemetry.attach("count", [:broadway, :batch_processor, :stop], count, nil)
{producer, {producers, processors, batch_processors, size}} = Source.producer(source, place)
batcher = [batch_size: size, batch_timeout: 200, concurrency: batch_processors]
{used_before, _} = :erlang.statistics(:runtime)
started = System.monotonic_time(:microsecond)

{:ok, _} =
  Broadway.start_link(Events,
    name: Events,
    context: folder,
    producer: [module: producer, concurrency: producers],
    processors: [default: [concurrency: processors, max_demand: 100]],
    batchers: [clicks: batcher, views: batcher]
  )

receive do
  :done -> :ok
after
  240_000 -> raise "acknowledged #{:counters.get(counter, 1)} of #{wanted} messages in four minutes"
end

took = (System.monotonic_time(:microsecond) - started) / 1.0e6
{used, _} = :erlang.statistics(:runtime)
Broadway.stop(Events)
IO.puts("#{took} #{(used - used_before) / 1000}")
