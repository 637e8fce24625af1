// A Pub/Sub server on loopback: Google's own fake of it. Prints its port in one line, once it listens.
// Ends with its starter.
package main

import (
	"fmt"
	"io"
	"net"
	"os"

	pb "cloud.google.com/go/pubsub/v2/apiv1/pubsubpb"
	"cloud.google.com/go/pubsub/v2/pstest"
	"google.golang.org/grpc"
)

func main() {
	fake := pstest.NewServerWithAddress("127.0.0.1:0")
	defer fake.Close()
	// Listens by itself, too: what pstest listens with refuses requests beyond 4 MB, and Pub/Sub takes 10.
	server := grpc.NewServer(grpc.MaxRecvMsgSize(16 << 20))
	pb.RegisterPublisherServer(server, &fake.GServer)
	pb.RegisterSubscriberServer(server, &fake.GServer)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go server.Serve(listener)
	defer server.Stop()
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	io.Copy(io.Discard, os.Stdin) // a pipe from the starter
}
