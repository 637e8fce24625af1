// A Pub/Sub server on loopback: Google's own fake of it. Prints its port in one line, once it listens.
// Ends with its starter.
package main

import (
	"fmt"
	"io"
	"net"
	"os"

	"cloud.google.com/go/pubsub/v2/pstest"
)

func main() {
	server := pstest.NewServerWithAddress("127.0.0.1:0")
	defer server.Close()
	_, port, _ := net.SplitHostPort(server.Addr)
	fmt.Println(port)
	io.Copy(io.Discard, os.Stdin) // a pipe from the starter
}
