import static org.apache.spark.sql.functions.col;
import static org.apache.spark.sql.functions.from_json;

import java.util.Map;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.streaming.Trigger;

/** Structured Streaming that `benchmarks.kafka_trickle` measures: events of a Kafka topic into a Delta table. */
public class Streaming {
    /** Run until the process is ended. Arguments: Kafka's address, topic, folder, schema of the events, trigger. */
    public static void main(String[] given) throws Exception {
        SparkSession spark = SparkSession.builder()
            .master("local[2]")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", false)
            .config("spark.log.level", "WARN")
            .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
            .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
            .getOrCreate();
        var query = spark.readStream()
            .format("kafka")
            .option("kafka.bootstrap.servers", given[0])
            .option("subscribe", given[1])
            .option("startingOffsets", "earliest")
            .load()
            .select(from_json(col("value").cast("string"), given[3], Map.of()).as("event"))
            .select("event.*")
            .coalesce(1) // a file for each commit, not for each partition of the topic
            .writeStream()
            .format("delta")
            .option("checkpointLocation", given[2] + "/checkpoint")
            .trigger(Trigger.ProcessingTime(given[4]))
            .start(given[2] + "/table");
        System.out.println("query started");
        query.awaitTermination();
    }
}
