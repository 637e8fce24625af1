import java.net.InetSocketAddress;
import java.util.Map;
import org.apache.iceberg.inmemory.InMemoryCatalog;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.eclipse.jetty.ee10.servlet.ServletContextHandler;
import org.eclipse.jetty.ee10.servlet.ServletHolder;
import org.eclipse.jetty.server.Server;

/** Serves a catalog in memory on loopback, with Iceberg's own REST service. Arguments: port, folder of the warehouse. */
public class IcebergRest {
    public static void main(String[] arguments) throws Exception {
        InMemoryCatalog catalog = new InMemoryCatalog();
        catalog.initialize("memory", Map.of("warehouse", arguments[1]));
        ServletContextHandler service = new ServletContextHandler();
        service.addServlet(new ServletHolder(new RESTCatalogServlet(new RESTCatalogAdapter(catalog))), "/*");
        Server server = new Server(new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0])));
        server.setHandler(service);
        server.start();
        System.out.println("The catalog is ready");
        server.join();
    }
}
